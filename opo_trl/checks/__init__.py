"""Bad input is named before any work starts: ranges, words, paths, YAML as written, and what libraries check late."""
