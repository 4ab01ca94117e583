"""The stages of making pico-anima."""
