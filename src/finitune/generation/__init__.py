"""Drawing pictures in a precision, recording what components are asked, and the verdict on the result."""
