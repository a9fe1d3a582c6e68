#!/bin/sh
cat /srv/data/greeting
