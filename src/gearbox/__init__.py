"""What the commands in src/ are made of. `config` and `gear` need no torch; everything else may."""
