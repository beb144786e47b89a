"""An exercise that a reader of the site solves on the page itself: the chapter's own checks, in the browser's own Python."""
