"""What the user wrote, checked before torch is imported."""
