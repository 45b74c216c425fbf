"""The control plane of gemray: CLI, Ray coordinator, gRPC server, text. Holds no tensors."""

import os

# Ray reads its authentication mode when it is imported, and every module that imports it is below this package. Set
# later, half of Ray would ask for a token that the other half does not send.
os.environ.setdefault("RAY_AUTH_MODE", "token")
