"""Read and check what the user wrote, before torch is imported."""
