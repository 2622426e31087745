"""The report room; docs/architecture.md says what belongs here."""
