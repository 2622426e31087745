"""The training room; docs/architecture.md says what belongs here."""
