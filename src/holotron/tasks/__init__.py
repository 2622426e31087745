"""The tasks room; docs/architecture.md says what belongs here."""
