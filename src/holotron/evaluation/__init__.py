"""The evaluation room; docs/architecture.md says what belongs here."""
