"""How a process starts, is watched and ends. No torch."""
