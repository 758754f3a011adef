"""The processes of a job: started on one machine or under SLURM, the nodes checked before, the job requeued after."""
