"""What stands on the toys."""

from solutions.toy import double


def quadruple(x: int) -> int:
    """Four times a number. (Exercise)"""
    ### BEGIN SOLUTION
    return double(double(x))
    ### END SOLUTION
