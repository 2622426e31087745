"""The bench room; docs/architecture.md says what belongs here."""
