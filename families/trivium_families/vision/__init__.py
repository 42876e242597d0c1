"""What families that see are made of: image parts of messages, image processors, vision towers. A family puts them together in its
own file and gives them to `trivium.models.Family` as `vision`."""
