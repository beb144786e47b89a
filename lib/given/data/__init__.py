"""The data that the chapters read: text, images and weights."""
