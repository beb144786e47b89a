"""The browser that prints the book and tests its pages."""

import shutil


def chromium() -> str | None:
    """The path of the Chromium, or Chrome, of this machine; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)
