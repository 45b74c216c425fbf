"""Commands that ask a running server: they need `gemray-client[cli]` alone. `gemray` has them, too."""
