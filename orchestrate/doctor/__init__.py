"""What keeps jobs from running here."""
