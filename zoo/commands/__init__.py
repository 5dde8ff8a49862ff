"""The command `zoo`: `entry_point` begins it, `app` says which sub-command lies where, a file holds sub-commands of one kind."""
