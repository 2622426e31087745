"""The agent room; docs/architecture.md says what belongs here."""
