"""holotron: the open stack for hybrid SSM-attention computer-use models."""

__version__ = "0.1.0"
