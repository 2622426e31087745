"""The serving room; docs/architecture.md says what belongs here."""
