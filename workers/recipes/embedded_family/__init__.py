"""How the embedded Gemma 4 family was made: one seeded script per stage (see README.md)."""
