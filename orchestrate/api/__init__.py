"""Jobs as the command line and programs start them: from what is asked for to a prepared job."""
