"""Compare Gearbox with other trainers: the same chats, model, optimizer and rows per step, in one run."""
