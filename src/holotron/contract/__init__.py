"""What the model reads and says: Step and its tools, coordinates, prompts, messages, parsing."""
