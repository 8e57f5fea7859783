"""The rates that no table of chips has."""

import pytest

from benchmarks.rates import examine_rates, main


@pytest.mark.slow
def test_the_fixed_time_of_a_step_and_products_of_all_formats_are_timed(monkeypatch, capsys):
    rates = examine_rates()
    assert rates["step"]["ms"] > 0 and rates["step"]["blocks"] == 36
    assert all(p["tflops"] > 0 and p["gradient_tflops"] > 0 for p in rates["products"])
    assert {p["format"] for p in rates["products"]} == {"affine4", "mxfp4", "nvfp4"}

    monkeypatch.setattr("benchmarks.rates.examine_rates", lambda: rates)
    main()
    assert "with 36 blocks of next to nothing" in capsys.readouterr().out
