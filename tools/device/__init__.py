"""Models and published runs that the device model is compared with."""
