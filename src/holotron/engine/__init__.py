"""The engine room; docs/architecture.md says what belongs here."""
