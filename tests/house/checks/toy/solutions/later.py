"""What stands on the toys."""

from solutions.toy import double


def quadruple(x: int) -> int:
    """Four times a number. (Exercise)

    Size: 5 minutes, difficulty 1, core.
    """
    ### BEGIN SOLUTION
    return double(double(x))
    ### END SOLUTION
