"""One server for the tests of a module, which may define another one of the name."""

from support.cluster.served import fresh_gang, served  # noqa: F401 - fixtures
