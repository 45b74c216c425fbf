"""OpenAI's HTTP API over a gemray server: an ASGI application that is a client of it."""
