"""The draft service: the front door, and the small model behind it."""
