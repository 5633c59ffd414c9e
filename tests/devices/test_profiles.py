"""Names of devices, as people write them."""

from __future__ import annotations

import pytest

from encore.devices import PROFILES, DeviceProfile, find_profile
from encore.errors import OptionError


@pytest.mark.parametrize("name", ["RTX3060", "rtx 3060", "RTX 3060 12GB", "NVIDIA GeForce RTX 3060", "rtx-3060"])
def test_a_device_has_many_spellings(name: str) -> None:
    assert find_profile(name) is PROFILES["RTX3060"]


def test_memory_tells_devices_apart() -> None:
    assert find_profile("A100-SXM4-80GB") is PROFILES["A100-80GB"]
    assert find_profile("A100 40GB") is PROFILES["A100-40GB"]
    assert find_profile("H100-SXM5-80GB") is PROFILES["H100"]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_profile_finds_itself_and_is_plausible(profile: DeviceProfile) -> None:
    assert find_profile(profile.name) is profile
    assert find_profile(profile) is profile
    assert 0 < profile.context < profile.usable < profile.memory
    assert profile.flops < profile.tensor_flops


def test_an_unknown_device_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="nearest is 'RTX3060'"):
        find_profile("RTX3061")
    with pytest.raises(OptionError, match="not a device"):
        find_profile(3060)  # type: ignore[arg-type]
