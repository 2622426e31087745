"""The computer room; docs/architecture.md says what belongs here."""
