"""What a person sees of a job while it runs."""
