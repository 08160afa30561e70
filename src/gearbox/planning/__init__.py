"""Plan memory, time and price from the files, before a GPU is booked."""
