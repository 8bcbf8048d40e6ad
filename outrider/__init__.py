"""What both services and their clients stand on; imports nothing by itself."""
