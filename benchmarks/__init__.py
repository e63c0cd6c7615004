"""Speed, measured side by side with what a user would pick instead, in one run on one machine."""
