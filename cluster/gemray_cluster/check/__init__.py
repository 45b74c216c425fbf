"""Start-up checks: each looks at one condition and says in a sentence what is there and what is wanted."""
