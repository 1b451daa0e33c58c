"""The console: a page for operators, without a build step and without assets of other hosts (docs/console.md)."""
