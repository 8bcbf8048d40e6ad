"""Plans, measures and checks a deployment. Pictures need the extra `bench`; models run with the extra `service`."""
