"""Does the norm of the Riemannian Hessian notice a rescaling? Tables 2 and 3 of Rangamani et al. 2019.

The same as `flatness study run rangamani2019-invariance --scale paper` with one repetition: networks F_1 and
C_1 of their Table 1, 500 random samples with random labels, and both settings of λ.
"""

from __future__ import annotations

import tempfile

import flatness


def main() -> None:
    spec = {"title": "Tables 2 and 3", "experiment": {"name": "rangamani2019_invariance", "repetitions": 1}}
    with tempfile.TemporaryDirectory() as folder:
        study = flatness.study.run(spec, folder, jobs=1, progress=False)
    print(study)
    worst = max(row["difference"] / row["published"] for row in study.summary)
    print(f"\nlargest ratio of our float32 difference to the paper's: {worst:.2f}")


if __name__ == "__main__":
    main()
