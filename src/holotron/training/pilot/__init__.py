"""The pilot: a small policy of the released architecture, trained from seeds on pages of our own browser."""
