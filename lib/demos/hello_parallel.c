/* Scatter, halve, reduce, broadcast: mpicc hello_parallel.c -o hello && mpiexec -n 4 ./hello */
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int values[4] = {39, 72, 129, 42}, mine, total = 0, rank, n_ranks;
    float mean = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    if (n_ranks != 4) {
        if (rank == 0) fprintf(stderr, "%d ranks, expected 4\n", n_ranks);
        MPI_Finalize();
        return 1;
    }
    MPI_Scatter(values, 1, MPI_INT, &mine, 1, MPI_INT, 0, MPI_COMM_WORLD);
    mine = mine / 2; /* of two integers: an integer */
    MPI_Reduce(&mine, &total, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) mean = (float)total / n_ranks;
    MPI_Bcast(&mean, 1, MPI_FLOAT, 0, MPI_COMM_WORLD);
    printf("rank %d of %d in C: my half %d, the mean %.2f\n", rank, n_ranks, mine, mean);
    MPI_Finalize();
    return 0;
}
