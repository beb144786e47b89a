"""What the chapters read: text, images, weights."""
