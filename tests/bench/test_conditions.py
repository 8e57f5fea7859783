"""The state of a machine, from what the tools of macOS print."""

import pytest

from mlx_packs import macos, runtime
from mlx_packs.bench.run import Conditions, disturbances, read_conditions

BATTERY = "pmset -g batt"
SETTINGS = "pmset -g"
PRESSURE = "notifyutil -g com.apple.system.thermalpressurelevel"
GPU = "ioreg -r -d 1 -w 0 -c IOAccelerator"
# What a plugged in, cool and idle MacBook Pro prints
IDLE = {
    BATTERY: "Now drawing from 'AC Power'\n -InternalBattery-0 (id=24576099)\t100%; charged\n",
    SETTINGS: "Currently in use:\n standby              1\n lowpowermode         0\n",
    PRESSURE: "com.apple.system.thermalpressurelevel 0\n",
    GPU: "+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, busy 0 (2 ms), retain 92>\n    {\n"
    '      "IOReportLegend" = ({"IOReportChannels"=((1,2,"Device Utilization %"))})\n'
    '      "PerformanceStatistics" = {"Tiler Utilization %"=3,"Renderer Utilization %"=3,'
    '"Device Utilization %"=4,"SplitSceneCount"=0}\n'
    '      "model" = "Apple M3 Max"\n      "gpu-core-count" = 40\n    }\n',
}
UNPLUGGED = (
    "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=24576099)\t61%; discharging\n"
)


def conditions(**changes) -> Conditions:
    printed = IDLE | {globals()[name]: text for name, text in changes.items()}
    return read(lambda command: printed[" ".join(command)], True)


def read(output, is_macos: bool) -> Conditions:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(macos, "output", output)
        patch.setattr(macos, "is_macos", lambda: is_macos)
        return read_conditions()


def test_an_idle_mac_has_no_disturbance(monkeypatch):
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    found = conditions()
    assert (found.power, found.low_power_mode, found.thermal) == ("AC", False, "nominal")
    assert (found.gpu_utilization, found.gpu_cores) == (4, 40)
    assert found.load >= 0 and disturbances(found) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"BATTERY": UNPLUGGED}, "runs on battery"),
        ({"SETTINGS": " lowpowermode         1\n"}, "is in Low Power Mode"),
        ({"SETTINGS": " standby 1\n powermode            1\n"}, "is in Low Power Mode"),
        ({"PRESSURE": IDLE[PRESSURE].replace("0", "2")}, "is hot (thermal pressure heavy)"),
        (
            {"GPU": IDLE[GPU].replace('"Device Utilization %"=4', '"Device Utilization %"=87')},
            "has another program on its GPU (87 % in use)",
        ),
    ],
    ids=["battery", "low-power", "power-mode", "hot", "gpu"],
)
def test_what_slows_a_mac_down_is_said(changes, said, monkeypatch):
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    assert disturbances(conditions(**changes)) == [said]


def test_a_desktop_and_high_power_mode_are_no_disturbance(monkeypatch):
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    found = conditions(BATTERY="Now drawing from 'AC Power'\n", SETTINGS=" powermode 2\n")
    assert found.power == "AC" and found.low_power_mode is False and disturbances(found) == []


def test_what_a_mac_does_not_say_is_unknown():
    nothing = read(lambda command: None, True)
    assert nothing == Conditions(load=nothing.load)
    garbage = read(lambda command: "permission denied 12\n", True)
    assert garbage == Conditions(load=garbage.load)
    assert conditions(PRESSURE="").thermal is None
    assert conditions(PRESSURE="com.apple.system.thermalpressurelevel 99\n").thermal is None


def test_elsewhere_only_the_load_is_known():
    def output(command):
        raise AssertionError("nothing is run")

    found = read(output, False)
    assert found == Conditions(load=found.load)


def test_a_busy_processor_counts_where_it_computes(monkeypatch):
    monkeypatch.setattr(runtime, "_assumed", "cpu")
    assert disturbances(Conditions(load=0.9)) == ["is busy with other programs (0.9 per core)"]
    assert disturbances(Conditions(load=0.1)) == []
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    assert disturbances(Conditions(load=0.9)) == []


def test_a_tool_that_is_not_there_or_hangs_prints_nothing(monkeypatch):
    monkeypatch.setattr(macos, "_ANSWER_TIMEOUT_S", 0.1)
    assert macos.output(["/nowhere/tool"]) is None
    assert macos.output(["sleep", "5"]) is None
    assert macos.output(["echo", "text"]) == "text\n"
