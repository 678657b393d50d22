"""What is read off one run folder, or several."""
