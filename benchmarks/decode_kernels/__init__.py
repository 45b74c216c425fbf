"""Times what decode and verify steps are made of, beside cuBLAS and the time of the bytes alone.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m decode_kernels [--parts linears,experts,...]

Every time is the median of replays of a CUDA graph that holds the work several times over inputs that exceed the cache
together. Results are checked against float64 first, outputs poisoned. With OUT in the environment everything that was
measured is written to $OUT/decode_kernels.json.

linears     tiles of `gemray_kernels.triton.linear` for every weight shape of the published models, beside cuBLAS
experts     tiles of the two products of 26B-A4B's experts at few rows
attention   chunks and tiles
small       norms and attention's inputs
layers      whole models cut to a few layers: with the library's products, with streamed ones, with early starts
"""
