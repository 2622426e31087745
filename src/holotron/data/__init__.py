"""The data room; docs/architecture.md says what belongs here."""
