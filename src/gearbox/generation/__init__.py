"""Generate text: answers of a batch on all ranks, and a chat on one device."""
