"""How a process is started on another host: ssh, srun or mpirun."""
