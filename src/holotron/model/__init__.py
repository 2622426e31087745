"""The model room; docs/architecture.md says what belongs here."""
